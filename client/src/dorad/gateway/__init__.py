"""`doractl gateway`: text and HTTP in front of a dorad server.

OpenAI's HTTP API (`/v1`) and the Open Inference Protocol v2 (`/v2`, and gRPC on a port of its own),
over one `dorad.aio.Client`. The gateway keeps no state of its callers. The server gets each
caller's own token and decides what the caller may do. Needs `dorad[gateway]`.
"""
