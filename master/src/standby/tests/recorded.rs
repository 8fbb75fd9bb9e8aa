//! The metadata that kvmaster 0.1.0 stored before segment ids were reserved, recorded from a
//! running pool. It has the log behind position 28, the shards' snapshots at that position, and a
//! later snapshot of the system shard. Node B had segment 2 and left in between, so only the
//! shards' snapshots name that segment.

use super::*;

const RECORDED: &str = include_str!("../../../tests/fixtures/metadata-1.txt");

fn bytes(hex: &str) -> bytes::Bytes {
    let digits: Vec<u8> = hex.bytes().collect();
    let byte = |pair: &[u8]| {
        let text = std::str::from_utf8(pair).unwrap();
        u8::from_str_radix(text, 16).unwrap()
    };
    digits.chunks(2).map(byte).collect()
}

/// A store with the recorded metadata.
async fn stored(directory: &std::path::Path) -> EmbeddedStore {
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let lines = || {
        RECORDED
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>())
    };
    let number = |text: &str| text.parse::<u64>().unwrap();
    let cut = lines().find(|words| words[0] == "cut").unwrap();
    let cut = number(cut[1]);
    for seq in 1..=cut {
        store
            .append(epoch, LogSeq(seq), encode_group(&[]))
            .await
            .unwrap();
    }
    for words in lines().filter(|words| words[0] == "group") {
        let seq = LogSeq(number(words[1]));
        store.append(epoch, seq, bytes(words[2])).await.unwrap();
    }
    for words in lines().filter(|words| words[0] == "snapshot") {
        let shard = crate::store::ShardIndex(words[1].parse().unwrap());
        let seq = LogSeq(number(words[2]));
        let chunks = vec![bytes(words[3])];
        store.put_snapshot(epoch, shard, seq, chunks).await.unwrap();
    }
    store.truncate_log(epoch, LogSeq(cut)).await.unwrap();
    store
}

#[tokio::test]
async fn a_log_and_snapshots_of_the_first_format_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let store = stored(directory.path()).await;
    let standby = load(&store).await;
    let mut found: Vec<String> = (0..directory::SHARDS)
        .flat_map(|shard| standby.directory.snapshot(shard))
        .map(|block| {
            let places: Vec<String> = block
                .replicas
                .iter()
                .map(|r| format!("{}:{}", r.segment.0, r.offset.0))
                .collect();
            format!(
                "block {} {} {} {} {} {} {}",
                block.namespace.0,
                block.key,
                block.version.0,
                block.length.0,
                block.checksum.0,
                block.hard_pin,
                places.join(",")
            )
        })
        .collect();
    found.sort();
    let mut expected: Vec<&str> = RECORDED
        .lines()
        .filter(|line| line.starts_with("block "))
        .collect();
    expected.sort_unstable();
    assert_eq!(found, expected);
    assert!(standby.namespaces.resolve("tenant").is_ok());
    assert!(standby.members.is_dropped(Incarnation(12)));
    assert_eq!(standby.members.all().len(), 1);
}

#[tokio::test]
async fn metadata_from_before_reserved_ids_gives_no_id_twice() {
    let directory = tempfile::tempdir().unwrap();
    let store = stored(directory.path()).await;
    let standby = load(&store).await;
    assert_eq!(
        standby.next_segment, 3,
        "segment 2 is named by snapshots alone"
    );
}
