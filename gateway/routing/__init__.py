"""One request across the workers: who serves it, its attempts, what ends them. Knows neither text nor protocols."""
