"""The front door: OpenAI HTTP and gRPC, tokenising, validation, routing and orchestration of handoffs. Never imports torch."""
