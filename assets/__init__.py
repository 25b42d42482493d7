"""What Dagster materialises: a module a group of assets."""
