"""A state machine over every memory and state call, held against a plain model of what a sequence must hold."""
