"""The front door: OpenAI HTTP and gRPC, tokenising, validation, routing, orchestration. Never imports torch."""
