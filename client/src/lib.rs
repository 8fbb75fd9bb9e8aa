//! The client library that inference workers embed.
//!
//! Control goes to kvmaster through gRPC, in batches; bytes move straight between the worker's
//! memory and the store nodes. Every operation has a deadline, every read is verified against the
//! checksum that the writer committed, and a miss is a value, not an error.
//!
//! ```text
//!              ┌────────── Client ──────────┐
//!  batch_put ─►│ put    reserve write commit│──gRPC──► kvmaster
//!  batch_get ─►│ get    locate  read  verify│
//!  get_range ─►│ range  (64 KiB chunks)     │══bytes═► kvstore-node (shm or TCP)
//!  get_view  ─►│ view   pin, read in place  │
//!              └────────────────────────────┘
//! ```
//!
//! It is not for operators (that is `kvctl`, built on it), and it keeps no bytes of its own.
