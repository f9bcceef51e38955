"""The client, written for asyncio. The one for threads is generated: client/sync_source.py."""
