"""CPU provider (interim: plain torch bodies behind the final signatures; the kernels replace them)."""
from __future__ import annotations

import torch

from vime.ops import reference as ref
from vime.ops import registry


def _f(fn):
    def run(x, *args):
        return fn(x.float(), *[a.float() if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in args])
    return run


def _attention_varlen(q, k, v, cu, scale, causal):
    return ref.attention_varlen(q.float(), k.float(), v.float(), cu, scale, causal).to(q.dtype)


def _attention_paged(q, cache, table, lens, starts, scale):
    outs = torch.zeros_like(q)
    bs = cache.shape[3]
    for b in range(len(lens)):
        n = int(lens[b])
        s, e = int(starts[b]), int(starts[b + 1])
        blocks = cache[table[b, :(n + bs - 1) // bs].long()]
        kv = blocks.permute(1, 0, 3, 2, 4).reshape(2, -1, cache.shape[2], cache.shape[4])[:, :n].float()
        qq = torch.zeros(n, *q.shape[1:])
        qq[n - (e - s):] = q[s:e].float()
        outs[s:e] = ref.attention_varlen(qq, kv[0], kv[1], torch.tensor([0, n]), scale)[n - (e - s):].to(q.dtype)
    return outs


def _write(k, v, cache, slots):
    bs = cache.shape[3]
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // bs, 0, :, slot % bs] = k[i]
            cache[slot // bs, 1, :, slot % bs] = v[i]


def _logprob(logits, ids, t, entropy):
    lp = ref.log_softmax(logits.float(), t)
    return lp.gather(1, ids.long()[:, None])[:, 0], (-(lp.exp() * lp).sum(-1) if entropy else None)


def _sample(logits, seed, position, temperature, top_k, top_p):
    return torch.tensor([ref.sample(logits[i].float(), int(seed[i]), int(position[i]), float(temperature[i]),
                                    0 if top_k is None else int(top_k[i]), 1.0 if top_p is None else float(top_p[i]))
                         for i in range(len(logits))])


def _table(p, f):
    a = p.double()[:, None] * f
    return a.cos().float(), a.sin().float()


for _dtype in (torch.float32, torch.bfloat16):
    for _op, _functions in {
        "linear": {"linear": lambda x, w: _f(ref.linear)(x, w).to(x.dtype)},
        "norm": {"rms_norm": lambda x, w, e: _f(ref.rms_norm)(x, w, e).to(x.dtype),
                 "add_rms_norm": lambda x, r, w, e: (_f(ref.rms_norm)(x + r, w, e).to(x.dtype), x + r)},
        "rope": {"apply_rope": lambda x, c, s, i: ref.apply_rope(x.float(), c, s, i).to(x.dtype), "table": _table},
        "activation": {"silu_and_mul": lambda x: _f(ref.silu_and_mul)(x).to(x.dtype)},
        "embedding": {"embedding": ref.embedding},
        "attention": {"attention_varlen": _attention_varlen, "attention_paged": _attention_paged, "kv_cache_write": _write,
                      "kv_cache_shape": lambda n, b, g, d, t: (n, 2, g, b, d)},
        "logprob": {"log_softmax": lambda x, t: ref.log_softmax(x.float(), t), "token_logprob": _logprob},
        "sampling": {"sample": _sample},
    }.items():
        registry.register(_op, "cpu", _dtype, f"cpu/{_op}/interim@0", _functions)
