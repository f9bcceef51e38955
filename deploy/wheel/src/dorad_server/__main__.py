"""`python -m dorad_server`: the server of exactly this environment."""

from . import main

main()
