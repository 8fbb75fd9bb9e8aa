//! A whole pool in one thread and in virtual time: masters, store nodes, clients, a store and a network. One seed
//! decides everything, so that a failure can be repeated.
//!
//! ```text
//!   seed ─► Plan ─► World ──┬─ masters   Pool, journal, standby, services    (production)
//!             ▲             ├─ nodes     fence, memory, session, media       (production)
//!             │ shrink      ├─ clients   put, get, leases, masters           (production)
//!             │             ├─ Net       calls, sessions, links              (simulated)
//!           Report ◄────────┤─ Disk      the metadata store: log, election   (simulated)
//!                           ├─ Ssd       the disks of nodes                  (simulated)
//!        violation, trace   └─ checks    bytes, history, accounts, rest
//! ```
//!
//! Production code stays as it is: time and randomness come through `kvpool_seams`, timers through `tokio::time`, and
//! workers are tasks of one runtime here. [simulation.md](../../docs/simulation.md) has the words, the rules, and how
//! to read a trace. [ADR 0052](../../docs/adr/0052-deterministic-simulation.md) says why it is so.
//!
//! ```sh
//! cargo xtask simulate --seeds 1000            # many histories; a failure is made smaller and printed
//! cargo xtask simulate --seed 4711 --trace     # one, with its trace
//! ```

mod absence;
mod ambush;
mod answers;
mod budget;
mod chains;
mod checks;
mod clock;
mod copies;
mod dice;
mod doubts;
mod drains;
mod entropy;
mod history;
mod intruder;
mod kept;
mod leaderless;
mod leases;
mod life;
mod link;
mod load;
mod master;
mod media;
mod net;
mod pins;
mod plan;
mod promises;
mod removed;
mod replicas;
mod rest;
mod shrink;
mod sight;
mod spans;
mod ssd;
mod store;
mod successor;
mod tenants;
mod trace;
mod whole;
mod world;
mod written;

pub use plan::{
    Ambush, Call, Departs, DiskFault, Fault, Logged, Mix, Moment, Noise, Plan, Process, Said,
    Tenant, Trick,
};
pub use shrink::shrink;
pub use world::{Report, run};
