"""`doractl gateway`: text and HTTP in front of dorad servers.

OpenAI's HTTP API (`/v1`) and the Open Inference Protocol v2 (`/v2`, and gRPC on a port of its own),
over a pool of one or more servers. The gateway keeps no state of its callers. The servers get each
caller's own token and decide what the caller may do. Needs `dorad[gateway]`.
"""
