"""A Llama of transformers with random weights, its forward pass under torch.compile."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

device = sys.argv[1]
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
    max_position_embeddings=256,
)
model = LlamaForCausalLM(config).to(device).eval()
tokens = torch.randint(0, 1000, (2, 64), device=device)
with torch.no_grad():
    expected = model(tokens, use_cache=False).logits
    got = torch.compile(model)(tokens, use_cache=False).logits
assert torch.allclose(got, expected, atol=2e-2), (got - expected).abs().max()
