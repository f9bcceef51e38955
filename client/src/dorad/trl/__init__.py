"""TRL's trainers with dorad in the place of vLLM. See docs/guides/trl.md.

    GRPOTrainer = dorad.trl.served(GRPOTrainer, "127.0.0.1:50051")

`served` works for every trainer of TRL that generates with `use_vllm=True`. Needs the extra `trl`.
"""

from dorad._unsupported import UnsupportedError
from dorad.trl._generation import Generation
from dorad.trl._served import served

__all__ = ["Generation", "UnsupportedError", "served"]
