"""What an agent loop sends to a model: transcripts as data, and the layouts that turn a transcript into prompts."""
