"""What the demo asks by default: a page of text and a question about it, some 500 tokens."""

PROMPT = """\
Read this, then answer the question at its end.

A language model answers in two phases. In the first one, called prefill, it reads the whole prompt at once and
computes two vectors, a key and a value, for every token in every layer. All of them together are called the KV
cache. This work is limited by how fast the processor can multiply matrices, and it keeps a large accelerator
busy. In the second phase, called decode, the model writes the answer, one token after the other. Each new token
looks back at the keys and values of all tokens before it, so this work is limited by how fast memory can be
read, and most of the arithmetic units stay idle.

When both phases share one machine they get into each other's way. A long prompt that arrives while ten answers
are being written makes all ten of them stutter, because one step of prefill takes as long as dozens of steps of
decode. Operators therefore run them on different machines: some do nothing but prefill, others do nothing but
decode, and each kind gets the hardware, the batch size and the number of replicas that suit it. A router stands
in front of them and chooses one of each for every request.

There is a price. The KV cache of the prompt is computed in one place and needed in another, and it is large:
for a small model some tens of kilobytes for every token, for a large one several hundred. It must travel
between the two machines before the first word can be written. If it travels only after prefill has ended, the
user waits for both, one after the other. If it travels while prefill is still computing, piece by piece, nearly
all of the journey is hidden behind work that had to be done anyway. And it has to arrive whole: a cache with
one wrong page gives fluent, confident, wrong answers, and no error message at all. So the machine that computed
a page must promise not to reuse it before the other side has said that it has read it, and the other side must
ask, after its last read, whether that promise still held.

Question: in two sentences, why are prefill and decode run on different machines, and what does that cost?"""
