"""The wire contract: tandem.v1 .proto files and the code generated from them (`make proto`)."""
