//! Sessions over real connections: every byte is compared, and processes die.
//!
//! - `push`: rooms between ranks of several layouts, with pages that are held and metadata
//! - `faults`: peers that are killed, stopped, silent or give up
//! - `offers`: offers that wait for pins, and receivers that decline
//! - `intruder`: letters and writes of processes that are no peers
//! - `relay`: a relay that changes, repeats, reorders and cuts the bytes between two sessions
//! - `ranks`: a rank whose bytes encode their right places
//! - `slow`: a network on which a room takes longer than a write may
//! - `vanished`: a peer whose host is gone
//! - `child`: a rank as a process of its own

mod child;
mod faults;
mod intruder;
mod offers;
mod push;
mod ranks;
mod relay;
mod slow;
mod vanished;
