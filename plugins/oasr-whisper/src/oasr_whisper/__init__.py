"""OpenAI's Whisper models."""
