"""`doractl gateway`: text and HTTP in front of a dorad server, in the forms other programs speak.

OpenAI's HTTP API (`/v1`) and the Open Inference Protocol v2 (`/v2`, and gRPC on a port of its own),
over one `dorad.aio.Client`. The gateway holds no state of its callers': whatever a caller may do is
decided by the server, which gets the caller's own token. Needs `dorad[gateway]`.
"""
