"""What `splitserve bench` measures. Each benchmark is a module of its own that ends in one `report.Report`."""
