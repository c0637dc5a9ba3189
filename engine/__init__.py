"""Inference without any network: model, weights, KV pool, prefix cache, scheduler, sampler."""
