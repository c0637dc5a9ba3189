"""What clients speak to: HTTP and gRPC, their bodies and objects, and the page. Knows nothing of workers."""
