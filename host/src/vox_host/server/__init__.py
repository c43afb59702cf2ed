"""HTTP in, service calls out, errors to statuses. The surface is written down in docs/http.md."""
