"""Cache precision without an engine: codecs, KVarN, the precision tail, attention and memory they imply."""
