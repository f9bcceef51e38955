"""`doractl gateway --rl`: the routes of vLLM that RL libraries call beside OpenAI's API.

They load and unload adapters, pause and resume, sleep and wake, and generate from token ids. The
server decides by its roles what a caller may do.
"""
