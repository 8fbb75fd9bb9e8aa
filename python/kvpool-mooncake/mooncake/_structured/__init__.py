"""Objects of named members, and tables of rows, over the methods of a store.

- `refs`: what callers hold: references, schemas, slices, and their transport as JSON
- `values`: any value of Python as bytes, without pickle
- `members`: arrays, tensors, bytes and rows of values as members with a description
- `bundles`: members as chunks in a store, with a manifest
- `tables`: batches with tensor fields and other fields ("DataProto")
"""
