"""The asyncio client. The client for threads is generated from it: client/sync_source.py."""
