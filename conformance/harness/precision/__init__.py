"""Cache precision: codecs, KVarN, the precision tail, attention and memory they imply, and all of it on a real build."""
