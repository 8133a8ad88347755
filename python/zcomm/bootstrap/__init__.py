"""Bootstrap: from environment variables to ranks that are connected and belong to one job."""
