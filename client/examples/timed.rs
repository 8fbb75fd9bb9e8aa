//! Times calls of the client for another program, which commands each call over standard input.
//! `python/benches/cost.py` measures the cost of a binding against it.
//!
//! Usage: `timed MASTER KEYS BLOCK_BYTES`. It reads one command a line. It makes the call twice, so that the
//! process has not just been woken, and writes the nanoseconds of the second call on a line. The commands:
//!
//! * `get N` gets the first N of the blocks `cost-0`, `cost-1`, ... into memory that it keeps.
//! * `exist N` asks for the first N digests of the chain of tokens 0, 1, 2, ... with one token a block.
//! * `exist-text N` asks for the keys `cost-text-0`, `cost-text-1`, ...
//! * `exist-named N` asks for keys as engines name them: `cost@tp_rank:0@` and 64 hex digits.
//!
//! Digests become keys before the call, texts within it.

use kvpool_client::blocking::Client;
use kvpool_client::{GetBlock, GetOptions, Leasing, Namespace, Options, Region};
use kvpool_types::{Key, KeyRef, Length, chain};
use std::io::{BufRead, Write};
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [master, keys, block] = args.as_slice() else {
        return Err("use: timed MASTER KEYS BLOCK_BYTES".into());
    };
    let (keys, block): (u32, u64) = (keys.parse()?, block.parse()?);
    let client = Client::connect(Options {
        masters: vec![master.clone()],
        ..Options::default()
    })?;
    let tokens: Vec<u32> = (0..keys).collect();
    let digests = chain::chain_keys(Namespace::default().seed(), NonZeroUsize::MIN, &tokens);
    let named = |prefix: &str| -> Result<Vec<Key>, Failure> {
        let key = |number| Ok(Key::parse(&format!("{prefix}{number}"))?);
        (0..keys).map(key).collect()
    };
    let blocks = named("cost-")?;
    let texts: Vec<String> = (0..keys)
        .map(|number| format!("cost-text-{number}"))
        .collect();
    let names: Vec<String> = (0..keys)
        .map(|number| format!("cost@tp_rank:0@{number:064x}"))
        .collect();
    let mut memory: Vec<Region> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (call, count) = line
            .split_once(' ')
            .ok_or("a command is a call and a number")?;
        let count: usize = count.parse()?;
        while memory.len() < count && call == "get" {
            memory.push(Region::allocate(Length(block)));
        }
        let once = || match call {
            "get" => get(&client, &blocks[..count], &memory),
            "exist" => exist(&client, &digests[..count]),
            "exist-text" => exist_texts(&client, &texts[..count]),
            "exist-named" => exist_texts(&client, &names[..count]),
            other => Err(format!("{other:?} is no call").into()),
        };
        once()?;
        println!("{}", once()?.as_nanos());
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Gets blocks. All of them are present.
fn get(client: &Client, keys: &[Key], memory: &[Region]) -> Result<Duration, Failure> {
    let began = Instant::now();
    let gets = keys.iter().zip(memory);
    let gets = gets.map(|(key, memory)| GetBlock::new(key.clone(), memory.whole()));
    let found = client.batch_get(gets.collect(), &GetOptions::default());
    let took = began.elapsed();
    for outcome in found {
        if !outcome?.is_hit() {
            return Err("a block is missing".into());
        }
    }
    Ok(took)
}

/// Asks for keys from texts, which are parsed and packed one by one.
fn exist_texts(client: &Client, texts: &[String]) -> Result<Duration, Failure> {
    let began = Instant::now();
    let mut packed = client.packer();
    for text in texts {
        packed.push(KeyRef::parse(text, &mut [0; 32])?);
    }
    let (present, _lease) = client.exist_packed(packed, Leasing::Lease)?;
    let took = began.elapsed();
    if present.contains(&false) {
        return Err("a key is missing".into());
    }
    Ok(took)
}

/// Asks which keys are present; all are.
fn exist(client: &Client, keys: &[Key]) -> Result<Duration, Failure> {
    let began = Instant::now();
    let present = client.is_exist(keys)?;
    let took = began.elapsed();
    if present.contains(&false) {
        return Err("a key is missing".into());
    }
    Ok(took)
}
