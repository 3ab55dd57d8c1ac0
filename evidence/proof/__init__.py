"""What is proved for every length: of healthy models how many, of faulty ones none."""
