"""Rollout by vLLM itself, its build for CPUs, in an environment of its own (`make test-vllm-rollout`)."""
