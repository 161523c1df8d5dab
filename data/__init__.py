"""From text to token shards (text, fineweb), to one stream of tokens (shards), to the batch of a step (loader)."""
