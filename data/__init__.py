"""Turns text into token shards (text), joins shards to one stream (shards), and cuts it into batches (loader)."""
