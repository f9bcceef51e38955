"""The parts of dorad.ray."""
