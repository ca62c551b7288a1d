"""Files in storage services: buckets of S3 and Google Cloud Storage, HDFS, and memory for tests, through fsspec."""
