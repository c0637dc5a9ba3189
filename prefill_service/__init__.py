"""The prefill tier: computes prompts, samples the first token, sends sealed KV blocks."""
