//! A worker's use of the pool: find the leading blocks that the pool has, compute and put the others, and
//! get the whole chain back. It needs a running pool: `kvmaster` and `kvstore-node --segment 64MiB`.

use kvpool_client::{
    Client, GetBlock, GetOptions, Length, Namespace, Options, PutBlock, PutOptions, Region, chain,
};
use std::num::NonZeroUsize;

const BLOCK_BYTES: usize = 64 << 10;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let namespace = Namespace {
        name: "llama-8b".into(),
        dtype: "bf16".into(),
        ..Default::default()
    };
    let seed = namespace.seed();
    let client = Client::connect(Options {
        namespace,
        ..Options::default()
    })
    .await?;

    // Chained SHA-256 over the prompt's tokens. A partial block at the end has no key.
    let tokens: Vec<u32> = (0..100).collect();
    let block_tokens = NonZeroUsize::new(16).ok_or("a block has tokens")?;
    let keys = chain::chain_keys(seed, block_tokens, &tokens);

    // One round trip: how many leading blocks are in the pool. The lease protects them from eviction.
    let prefix = client.match_prefix(&keys).await?;
    println!("{} of {} blocks are in the pool", prefix.blocks, keys.len());

    // Compute the missing blocks and put them: one outcome per block.
    let mut puts = Vec::new();
    for (at, key) in keys.iter().enumerate().skip(prefix.blocks) {
        let parent = at
            .checked_sub(1)
            .and_then(|before| keys.get(before))
            .cloned();
        let kv = Region::from(vec![u8::try_from(at)?; BLOCK_BYTES]);
        puts.push(PutBlock {
            parent,
            ..PutBlock::new(key.clone(), kv.whole())
        });
    }
    for outcome in client.batch_put(puts, &PutOptions::default()).await {
        println!("put: {:?}", outcome?);
    }

    // A decode worker, on this host or another, gets the chain into its own memory, verified.
    let targets: Vec<Region> = keys
        .iter()
        .map(|_| Region::allocate(Length(BLOCK_BYTES as u64)))
        .collect();
    let gets = keys
        .iter()
        .zip(&targets)
        .map(|(key, kv)| GetBlock::new(key.clone(), kv.whole()));
    for outcome in client
        .batch_get(gets.collect(), &GetOptions::default())
        .await
    {
        println!("get: {:?}", outcome?);
    }
    Ok(())
}
