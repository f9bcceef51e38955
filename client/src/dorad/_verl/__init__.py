"""The parts of dorad.verl. `settings` and `gate` work without verl and ray."""
