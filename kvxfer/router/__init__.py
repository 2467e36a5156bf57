"""The front door: speaks the OpenAI API, pairs each request with a prefill and a decode worker, streams the answer.

Never on the data path of a transfer, and never imports the engine: workers are HTTP addresses from the coordinator.
"""
