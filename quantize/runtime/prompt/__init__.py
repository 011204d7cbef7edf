"""Prompts: chats, pictures, their pieces, and the cache of their encoded beginnings."""
