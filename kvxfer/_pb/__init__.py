"""Generated protobuf and gRPC code, made from ``protos/kvxfer/_pb`` by ``python protos/generate.py``; nothing here is edited by hand."""
