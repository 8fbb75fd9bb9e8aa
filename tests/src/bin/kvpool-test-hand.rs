//! A process that holds a write, a view or a put for a test. The test can stop, continue and kill
//! it.
//!
//! ```text
//! kvpool-test-hand write MASTER KEY BYTES GRANT_MS   announce a shared-memory write, write on and on
//! kvpool-test-hand view MASTER KEY BYTES             hold a view; a line on stdin: check it again
//! kvpool-test-hand put MASTER FIRST BYTES            put blocks without end, one at a time
//! kvpool-test-hand put-once MASTER KEY BYTES WAY     put one block over `shm` or `tcp`, after a line that says so
//! ```
//!
//! It prints one line when it holds the write, view or put, and one line for every answer.

use anyhow::{Context, bail};
use kvpool_client::{Client, Options, PutBlock, PutOptions, TransportChoice, ViewOptions};
use kvpool_tests::blocks;
use kvpool_tests::grants::Control;
use kvpool_tests::raw::Port;
use kvpool_types::wire::data::{MapRequest, Meta, WriteRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Code, Offset};
use std::fs::File;
use std::io::BufRead;
use std::os::unix::fs::FileExt;
use std::path::Path;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let texts: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match texts[..] {
        ["write", master, key, length, grant_ms] => {
            write(master, key.parse()?, length.parse()?, grant_ms.parse()?).await
        }
        ["view", master, key, length] => view(master, key.parse()?, length.parse()?).await,
        ["put", master, first, length] => put(master, first.parse()?, length.parse()?).await,
        ["put-once", master, key, length, way] => {
            put_once(master, key.parse()?, length.parse()?, way).await
        }
        _ => bail!("not understood: {arguments:?}"),
    }
}

async fn write(master: &str, key: u64, length: u64, grant_ms: u64) -> anyhow::Result<()> {
    let mut control = Control::connect(master).await?;
    let granted = control.reserve(&blocks::key(key), length, grant_ms).await?;
    let mut port = Port::open_unix(Path::new(&granted.shm_path))?;
    port.hello(control.cluster)?;
    let map = MapRequest {
        incarnation: granted.incarnation,
        segment: granted.grant.extent.segment,
        writable: true,
    };
    let memory = File::from(port.map(control.epoch, &map)?);
    let request = WriteRequest {
        incarnation: granted.incarnation,
        grants: vec![granted.grant],
    };
    let codes = port.codes(Op::WriteBegin, control.epoch, &request.to_bytes(), &[])?;
    if codes != [Code::Ok] {
        bail!("the write was not begun: {codes:?}");
    }
    println!("{}", granted.grant.extent.offset);
    let garbage = vec![0xee; usize::try_from(length)?];
    loop {
        memory.write_all_at(&garbage, granted.grant.extent.offset.0)?;
    }
}

async fn view(master: &str, key: u64, length: usize) -> anyhow::Result<()> {
    let client = connect(master).await?;
    let key = blocks::key(key);
    // The first view maps the segment, so that the held view is pinned without a message.
    let options = ViewOptions::default();
    drop(client.get_view(&key, &options).await?);
    let view = client.get_view(&key, &options).await?.context("a hit")?;
    let expected = blocks::bytes_of(&key, length);
    println!("viewing");
    for line in std::io::stdin().lock().lines() {
        line?;
        let mut bytes = vec![0; length];
        view.read_at(Offset(0), &mut bytes);
        println!("{}", if bytes == expected { "right" } else { "wrong" });
    }
    Ok(())
}

async fn put(master: &str, first: u64, length: usize) -> anyhow::Result<()> {
    let client = connect(master).await?;
    for number in first.. {
        let key = blocks::key(number);
        let block = PutBlock::new(key.clone(), blocks::source(&key, length));
        client
            .batch_put(vec![block], &PutOptions::default())
            .await
            .remove(0)?;
        println!("{number}");
    }
    Ok(())
}

async fn put_once(master: &str, key: u64, length: usize, way: &str) -> anyhow::Result<()> {
    let transport = match way {
        "shm" => TransportChoice::Shm,
        "tcp" => TransportChoice::Tcp,
        other => bail!("there is no transport {other:?}"),
    };
    let options = Options {
        masters: vec![master.to_owned()],
        transport,
        ..Options::default()
    };
    let client = Client::connect(options).await?;
    let key = blocks::key(key);
    let block = PutBlock::new(key.clone(), blocks::source(&key, length));
    println!("putting");
    let mut outcomes = client.batch_put(vec![block], &PutOptions::default()).await;
    outcomes.remove(0)?;
    println!("put");
    Ok(())
}

async fn connect(master: &str) -> anyhow::Result<Client> {
    let options = Options {
        masters: vec![master.to_owned()],
        ..Options::default()
    };
    Ok(Client::connect(options).await?)
}
