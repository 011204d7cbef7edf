"""The stage convert: BF16 shards in, compressed-tensors shards out."""
