//! A standby behind a leader of a later version. It names a record that it cannot read, and retries
//! with growing delays.

use crate::etcd::{open, started};
use bytes::Bytes;
use kvpool_etcd::testing::Etcd;
use kvpool_master::Config;
use kvpool_master::clock::{BootClock, Clock};
use kvpool_master::leadership::{Candidate, Role, Seat};
use kvpool_master::metrics::Metrics;
use kvpool_master::store::record::{Seed, encode_group};
use kvpool_master::store::{LogSeq, MetadataStore, Record};
use kvpool_types::Epoch;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A group with one record that no version up to this one knows. With `required` a reader must not
/// skip it.
fn unknown(required: bool) -> Bytes {
    let tag = 0x0a | u8::from(required) << 4;
    let mut group = vec![1, 1, 0, 1, tag, 99, 5];
    // The second byte is the algorithm of the block checksums, which every group names.
    group[1] = encode_group(&[Record::Seed(Seed { seed: 1 })])[1];
    group.extend_from_slice(b"9.1.0");
    group.extend_from_slice(&[2, b'h', b'i']);
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &group);
    group.extend_from_slice(&crc.to_le_bytes());
    group.into()
}

async fn until(mut is_so: impl FnMut() -> bool, what: &str) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_names_a_required_record_and_retries_with_growing_delays() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_standby_names_a_required_record_and_retries_with_growing_delays",
        Etcd::start(directory.path())
    );
    let leader = open(&etcd, "c").await;
    let epoch = leader.begin_epoch(Epoch(1)).await.unwrap();
    let seed = encode_group(&[Record::Seed(Seed { seed: 1 })]);
    leader.append(epoch, LogSeq(1), seed).await.unwrap();
    let config = Config {
        etcd: etcd.endpoints(),
        cluster: "c".into(),
        ..Config::default()
    };
    let clock = Arc::new(BootClock) as Arc<dyn Clock>;
    let metrics = Arc::new(Metrics::new().unwrap());
    let seat = Arc::new(Seat::new(config, metrics, Arc::clone(&clock)));
    let here = "http://127.0.0.1:1".to_owned();
    let candidate = Candidate::start(Arc::clone(&seat), clock, here.clone(), here);
    let candidate = candidate.await.unwrap();
    until(|| seat.position() == LogSeq(1), "the standby follows").await;

    let group = unknown(false);
    leader.append(epoch, LogSeq(2), group).await.unwrap();
    until(|| seat.position() == LogSeq(2), "the record is skipped").await;
    assert_eq!(seat.role(), Role::Standby);

    let group = unknown(true);
    leader.append(epoch, LogSeq(3), group).await.unwrap();
    let mut waits = BTreeSet::new();
    let says = |reason: &str| reason.contains("run 9.1.0 or later here");
    let next_try = |reason: &str| reason.split("next try in ").nth(1).map(str::to_owned);
    let mut last = String::new();
    until(
        || {
            let reason = seat.reason();
            if says(&reason) {
                waits.extend(next_try(&reason));
                last = reason;
            }
            waits.len() >= 4
        },
        "it waits longer each time",
    )
    .await;
    println!("{last}");
    let expected = ["1s 600ms", "200ms", "400ms", "800ms"].map(str::to_owned);
    assert_eq!(waits, BTreeSet::from(expected));
    assert_eq!(seat.position(), LogSeq(2));
    candidate.stop().await;
}
