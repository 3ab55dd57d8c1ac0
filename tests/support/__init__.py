"""What tests share: fixtures in text, models made to be broken, isolated environments, a browser. No tests."""
