"""From text to token shards, to one stream of tokens (shards), to the batch of a step (loader)."""
