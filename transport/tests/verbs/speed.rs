//! Transfer speeds, to compare with `ib_write_bw` and `ib_read_bw` on the same device. Run by hand:
//! `cargo test -p kvpool-transport --test verbs -- --ignored --nocapture`.

use crate::ends::{Ends, Memory, run, transfer};
use kvpool_transport::rdma::{Access, Allows, Verb};
use std::time::{Duration, Instant};

#[test]
#[ignore = "measures, and judges nothing"]
fn batches() {
    let rail = rail!("batches");
    println!("{rail:?}");
    for (count, size) in [(32, 1 << 20), (128, 256 << 10), (16, 8 << 20), (1, 4096)] {
        let total = count * size;
        let ends = Ends::connect(&rail, Allows::Writes, total);
        let here = Memory::new(&rail, total, Access::Local);
        here.fill(3);
        for verb in [Verb::Write, Verb::Read] {
            let batch = || {
                // In an order in which nothing merges.
                (0..count)
                    .map(|i| {
                        let at = i * 7 % count * size;
                        transfer(verb, ends.there.remote(at), vec![here.part(at, size)])
                    })
                    .collect()
            };
            let begun = Instant::now();
            let mut rounds = 0;
            while begun.elapsed() < Duration::from_secs(3) {
                assert!(run(&ends.lane, batch()).iter().all(Result::is_ok));
                rounds += 1;
            }
            let each = begun.elapsed() / rounds;
            let speed = total as f64 / each.as_secs_f64() / 1e9;
            println!("{verb:?} {count} x {size}: {speed:.3} GB/s, {each:?} a batch");
        }
    }
}
