//! Blocks of a GPU, on a device whose memory is this process's own.
//!
//! The tests check which bytes are staged, how many at a time, and the effect of a fault of the device.
//! The driver itself is tested where there is a GPU (`tests/gpu.rs`).

use super::put::{assert_linked, watch_links};
use super::{assert_soon, block, get_one, key};
use crate::testing::{Fault, Mode, Pool, pool_with};
use crate::{
    GetBlock, GetError, GetOptions, GetOutcome, GpuBuffer, PutBlock, PutOptions, PutOutcome,
};
use kvpool_transport::Region;
use kvpool_transport::gpu::{CopyEngine, Device, DeviceCopy, DeviceRange, GpuError};
use kvpool_types::{Code, Length, Offset};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const BASE: u64 = 0x7f00_0000_0000;
const DEVICE_BYTES: usize = 64 << 20;
const MIB: u64 = 1 << 20;

/// Two GPUs. The memory of the second one directly follows that of the first.
#[derive(Debug)]
struct Emulated {
    memory: Mutex<Vec<u8>>,
    /// How much pinned memory was allocated in all.
    pinned: AtomicU64,
    is_broken: AtomicBool,
}

impl Emulated {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            memory: Mutex::new(vec![0; 2 * DEVICE_BYTES]),
            pinned: AtomicU64::new(0),
            is_broken: AtomicBool::new(false),
        })
    }

    fn fill(&self, at: u64, bytes: &[u8]) {
        let from = usize::try_from(at).unwrap();
        self.memory.lock()[from..from + bytes.len()].copy_from_slice(bytes);
    }

    fn bytes(&self, range: Range<u64>) -> Vec<u8> {
        let range = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
        self.memory.lock()[range].to_vec()
    }

    fn check(&self) -> Result<(), GpuError> {
        if self.is_broken.load(Relaxed) {
            return Err(GpuError::Driver {
                call: "copy",
                reason: "the device is lost".to_owned(),
            });
        }
        Ok(())
    }
}

impl CopyEngine for Emulated {
    fn device_at(&self, address: u64) -> Option<Device> {
        let at = address.checked_sub(BASE)? / DEVICE_BYTES as u64;
        (at < 2).then(|| Device(u32::try_from(at).unwrap()))
    }

    fn pinned(&self, _: Device, length: Length) -> Result<Region, GpuError> {
        self.pinned.fetch_add(length.0, Relaxed);
        Ok(Region::allocate(length))
    }

    fn copy_out(&self, _: Device, copies: &[DeviceCopy]) -> Result<(), GpuError> {
        self.check()?;
        for DeviceCopy { pieces, host } in copies {
            let mut at = 0;
            for piece in pieces {
                let start = piece.address - BASE;
                host.write_at(Offset(at), &self.bytes(start..start + piece.length.0));
                at += piece.length.0;
            }
        }
        Ok(())
    }

    fn copy_in(&self, _: Device, copies: &[DeviceCopy]) -> Result<(), GpuError> {
        self.check()?;
        for DeviceCopy { pieces, host } in copies {
            let bytes = host.to_vec();
            let mut rest = bytes.as_slice();
            for piece in pieces {
                let (part, after) = rest.split_at(piece.length.as_usize().min(rest.len()));
                self.fill(piece.address - BASE, part);
                rest = after;
            }
        }
        Ok(())
    }
}

/// A pool, its GPUs, and a buffer over all of the first.
async fn with_gpu(staging: u64) -> (Pool, Arc<Emulated>, GpuBuffer) {
    let pool = pool_with(|_, options| {
        options.gpu_staging = Length(staging);
        // Some of these tests move tens of MiB, and run beside others.
        options.timeouts.put = Duration::from_secs(30);
        options.timeouts.get = Duration::from_secs(30);
    })
    .await;
    let gpus = Emulated::new();
    let range = DeviceRange {
        address: BASE,
        length: Length(DEVICE_BYTES as u64),
    };
    let buffer = pool.client.register_on(gpus.clone(), range).unwrap();
    (pool, gpus, buffer)
}

fn pattern(seed: u64, length: u64) -> Vec<u8> {
    (0..length)
        .map(|at| u8::try_from((at * 31 + seed * 7 + at / 251) % 256).unwrap())
        .collect()
}

#[tokio::test]
async fn blocks_go_from_scattered_device_memory_to_scattered_device_memory() {
    let (pool, gpus, buffer) = with_gpu(64 * MIB).await;
    let bytes = pattern(1, 10_000);
    gpus.fill(100, &bytes[..4_000]);
    gpus.fill(9_000, &bytes[4_000..]);
    let part = |from, length| buffer.slice(Offset(from), Length(length)).unwrap();
    let put = PutBlock {
        key: key("scattered"),
        parent: None,
        buffers: vec![part(100, 4_000), part(9_000, 6_000)],
    };
    let outcomes = pool
        .client
        .batch_put_gpu(vec![put], &PutOptions::default())
        .await;
    assert_eq!(outcomes, [Ok(PutOutcome::Stored { replicas: 1 })]);
    // Any other client gets these bytes from the pool.
    let (_, on_host) = get_one(&pool, "scattered", 10_000).await;
    assert_eq!(on_host, bytes);

    let get = GetBlock {
        key: key("scattered"),
        // The buffer is longer than the block. Its bytes beyond the block stay unchanged.
        buffers: vec![part(50_000, 7_000), part(60_000, 7_000)],
    };
    gpus.fill(60_000, &[0xAA; 7_000]);
    let outcomes = pool
        .client
        .batch_get_gpu(vec![get], &GetOptions::default())
        .await;
    assert!(outcomes[0].as_ref().unwrap().is_hit(), "{outcomes:?}");
    assert_eq!(gpus.bytes(50_000..57_000), bytes[..7_000]);
    assert_eq!(gpus.bytes(60_000..63_000), bytes[7_000..]);
    assert_eq!(gpus.bytes(63_000..67_000), [0xAA; 4_000]);
}

#[tokio::test]
async fn a_block_whose_device_buffers_overlap_is_refused_and_its_neighbours_are_got() {
    let (pool, gpus, buffer) = with_gpu(64 * MIB).await;
    let bytes = pattern(3, 100);
    let put = pool
        .client
        .batch_put(vec![block("a", &bytes)], &PutOptions::default())
        .await;
    assert_eq!(put, [Ok(PutOutcome::Stored { replicas: 1 })]);
    let part = |from, length| buffer.slice(Offset(from), Length(length)).unwrap();
    let get = |buffers| GetBlock {
        key: key("a"),
        buffers,
    };
    let gets = vec![
        get(vec![part(0, 100)]),
        get(vec![part(200, 60), part(240, 60)]),
        get(vec![part(460, 40), part(400, 60)]),
    ];
    let outcomes = pool
        .client
        .batch_get_gpu(gets, &GetOptions::default())
        .await;
    assert!(outcomes[0].as_ref().unwrap().is_hit(), "{outcomes:?}");
    let refused = outcomes[1].clone().unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(outcomes[2].as_ref().unwrap().is_hit(), "{outcomes:?}");
    assert_eq!(gpus.bytes(0..100), bytes);
    assert_eq!(gpus.bytes(200..300), [0; 100]);
    assert_eq!(gpus.bytes(460..500), bytes[..40]);
    assert_eq!(gpus.bytes(400..460), bytes[40..]);
}

#[tokio::test]
async fn a_batch_larger_than_the_staging_memory_passes_through_it() {
    let (pool, gpus, buffer) = with_gpu(4 * MIB).await;
    let (put, got): (Vec<_>, Vec<_>) = (0..24)
        .map(|at| {
            gpus.fill(at * MIB, &pattern(at, MIB));
            let name = key(&format!("large-{at}"));
            let from = buffer.slice(Offset(at * MIB), Length(MIB)).unwrap();
            let into = buffer.slice(Offset((24 + at) * MIB), Length(MIB)).unwrap();
            (PutBlock::new(name.clone(), from), GetBlock::new(name, into))
        })
        .unzip();
    let outcomes = pool.client.batch_put_gpu(put, &PutOptions::default()).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    let outcomes = pool.client.batch_get_gpu(got, &GetOptions::default()).await;
    for (at, outcome) in (0..).zip(&outcomes) {
        assert!(outcome.as_ref().unwrap().is_hit(), "block {at}");
        let bytes = gpus.bytes((24 + at) * MIB..(25 + at) * MIB);
        assert_eq!(bytes, pattern(at, MIB), "block {at}");
    }
    let pinned = gpus.pinned.load(Relaxed);
    assert!(pinned <= 4 * MIB, "{pinned} bytes were pinned");
}

#[tokio::test]
async fn a_chain_over_several_groups_stays_linked() {
    // Each block is a group of its own, and several groups are in transfer at once.
    let (pool, _, buffer) = with_gpu(4 * MIB).await;
    let links = watch_links(&pool);
    // Groups for the other node would be committed before the group with the parent of their block.
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(30)));
    let names: Vec<String> = (0..12).map(|n| format!("k{n}")).collect();
    let blocks = names.iter().enumerate().map(|(at, name)| {
        let from = Offset(at as u64 * MIB);
        PutBlock {
            key: key(name),
            parent: at.checked_sub(1).map(|parent| key(&names[parent])),
            buffers: vec![buffer.slice(from, Length(MIB)).unwrap()],
        }
    });
    let options = PutOptions::default();
    let outcomes = pool.client.batch_put_gpu(blocks.collect(), &options).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_linked(&links, &names);
}

#[tokio::test]
async fn of_upserts_of_one_key_in_several_groups_the_last_one_stays() {
    let (pool, gpus, buffer) = with_gpu(4 * MIB).await;
    // Each block is a group of its own. On the other node, a later group would end before an earlier one.
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(30)));
    for at in 0..15 {
        gpus.fill(at * MIB, &pattern(at, MIB));
    }
    let blocks = (0..15).map(|at| {
        let from = buffer.slice(Offset(at * MIB), Length(MIB)).unwrap();
        PutBlock::new(key(&format!("key-{}", at % 3)), from)
    });
    let options = PutOptions {
        upsert: true,
        ..PutOptions::default()
    };
    let outcomes = pool.client.batch_put_gpu(blocks.collect(), &options).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    for last in 12..15 {
        let (got, bytes) = get_one(&pool, &format!("key-{}", last % 3), 1 << 20).await;
        assert!(got.unwrap().is_hit(), "{last}");
        assert!(bytes == pattern(last, MIB), "{last}");
    }
}

/// If a group is not put, the groups behind it do not overtake the groups ahead of it.
#[tokio::test]
async fn a_chain_with_a_block_at_fault_stays_linked() {
    let (pool, _, buffer) = with_gpu(4 * MIB).await;
    let links = watch_links(&pool);
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(30)));
    let names: Vec<String> = (0..12).map(|n| format!("k{n}")).collect();
    let mut blocks = Vec::new();
    for (at, name) in names.iter().enumerate() {
        let from = Offset(at as u64 * MIB);
        blocks.push(PutBlock {
            key: key(name),
            parent: at.checked_sub(1).map(|parent| key(&names[parent])),
            buffers: vec![buffer.slice(from, Length(MIB)).unwrap()],
        });
        blocks.push(PutBlock {
            key: key(&format!("empty-{at}")),
            parent: None,
            buffers: Vec::new(),
        });
    }
    let outcomes = pool
        .client
        .batch_put_gpu(blocks, &PutOptions::default())
        .await;
    let stored = outcomes.iter().filter(|outcome| outcome.is_ok());
    assert_eq!(stored.count(), names.len(), "{outcomes:?}");
    assert_linked(&links, &names);
}

#[tokio::test]
async fn a_block_at_fault_never_fails_its_neighbours() {
    let (pool, gpus, buffer) = with_gpu(4 * MIB).await;
    gpus.fill(0, b"good");
    let other = DeviceRange {
        address: BASE + DEVICE_BYTES as u64,
        length: Length(MIB),
    };
    let other = pool.client.register_on(gpus.clone(), other).unwrap();
    let good = || buffer.slice(Offset(0), Length(4)).unwrap();
    let blocks = vec![
        PutBlock::new(key("first"), good()),
        PutBlock {
            key: key("on two devices"),
            parent: None,
            buffers: vec![good(), other.whole()],
        },
        PutBlock::new(
            key("too large"),
            buffer.slice(Offset(0), Length(5 * MIB)).unwrap(),
        ),
        PutBlock {
            key: key("empty"),
            parent: None,
            buffers: Vec::new(),
        },
        PutBlock::new(key("last"), good()),
        PutBlock::new(key("on the other"), other.whole()),
    ];
    let outcomes = pool
        .client
        .batch_put_gpu(blocks, &PutOptions::default())
        .await;
    let codes = outcomes.iter().map(|outcome| match outcome {
        Ok(_) => Code::Ok,
        Err(error) => error.code(),
    });
    let codes: Vec<_> = codes.collect();
    let expected = [
        Code::Ok,
        Code::InvalidArgument,
        Code::TooLarge,
        Code::InvalidArgument,
        Code::Ok,
        Code::Ok,
    ];
    assert_eq!(codes, expected, "{outcomes:?}");
}

#[tokio::test]
async fn a_block_without_buffers_has_what_is_left_of_the_batchs_time() {
    let (pool, _, buffer) = with_gpu(4 * MIB).await;
    pool.master.always("lookup", Fault::AnswerHangs);
    // Each block is a group of its own. The last one begins when the others have used up the time.
    let large = (0..3).map(|at| {
        let into = buffer.slice(Offset(at * MIB), Length(MIB)).unwrap();
        GetBlock::new(key(&format!("large-{at}")), into)
    });
    let mut blocks: Vec<_> = large.collect();
    blocks.push(GetBlock {
        key: key("without buffers"),
        buffers: Vec::new(),
    });
    let options = GetOptions {
        timeout: Some(Duration::from_secs(1)),
        ..GetOptions::default()
    };
    let begun = Instant::now();
    let outcomes = pool.client.batch_get_gpu(blocks, &options).await;
    let is_hit =
        |outcome: &Result<GetOutcome, GetError>| matches!(outcome, Ok(GetOutcome::Hit { .. }));
    assert!(!outcomes.iter().any(is_hit), "{outcomes:?}");
    assert_soon(begun, Duration::from_millis(1700));
}

#[tokio::test]
async fn what_is_not_device_memory_is_refused() {
    let (pool, gpus, _) = with_gpu(4 * MIB).await;
    for (address, length) in [
        (0, 4),
        (BASE - 1, 4),
        (BASE, 0),
        (BASE + DEVICE_BYTES as u64 - 2, 4),
        (u64::MAX - 1, 1),
    ] {
        let range = DeviceRange {
            address,
            length: Length(length),
        };
        let refused = pool.client.register_on(gpus.clone(), range).unwrap_err();
        assert_eq!(refused, GpuError::NotDeviceMemory(range));
    }
}

#[tokio::test]
async fn a_device_that_fails_is_an_error_and_stores_nothing() {
    let (pool, gpus, buffer) = with_gpu(4 * MIB).await;
    let slice = || buffer.slice(Offset(0), Length(8)).unwrap();
    gpus.is_broken.store(true, Relaxed);
    let put = vec![PutBlock::new(key("lost"), slice())];
    let outcomes = pool.client.batch_put_gpu(put, &PutOptions::default()).await;
    let error = outcomes[0].as_ref().unwrap_err();
    assert!(error.to_string().contains("the device is lost"), "{error}");
    assert_eq!(get_one(&pool, "lost", 8).await.0, Ok(GetOutcome::Miss));

    let stored = vec![block("kept", b"12345678")];
    let stored = pool.client.batch_put(stored, &PutOptions::default()).await;
    assert!(stored[0].is_ok(), "{stored:?}");
    let gets = vec![
        GetBlock::new(key("kept"), slice()),
        GetBlock::new(key("lost"), slice()),
    ];
    let outcomes = pool
        .client
        .batch_get_gpu(gets, &GetOptions::default())
        .await;
    assert!(
        matches!(outcomes[0], Err(GetError::Failed { .. })),
        "{outcomes:?}"
    );
    assert_eq!(outcomes[1], Ok(GetOutcome::Miss));
    // Nothing prevents the device from working again.
    gpus.is_broken.store(false, Relaxed);
    let gets = vec![GetBlock::new(key("kept"), slice())];
    let outcomes = pool
        .client
        .batch_get_gpu(gets, &GetOptions::default())
        .await;
    assert!(outcomes[0].as_ref().unwrap().is_hit());
    assert_eq!(gpus.bytes(0..8), b"12345678");
}

#[tokio::test]
async fn a_put_that_finds_no_staging_memory_ends_by_its_deadline() {
    let (pool, gpus, buffer) = with_gpu(MIB).await;
    gpus.fill(0, &[1; 16]);
    let slice = || buffer.slice(Offset(0), Length(16)).unwrap();
    let put = |name: &str| vec![PutBlock::new(key(name), slice())];
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Hangs);
    }
    let options = PutOptions {
        timeout: Some(Duration::from_millis(200)),
        ..PutOptions::default()
    };
    // The first call holds all of the staging memory, because its transfer hangs.
    let first = pool.client.batch_put_gpu(put("hangs"), &options);
    let begun = Instant::now();
    let second = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        pool.client.batch_put_gpu(put("waits"), &options).await
    };
    let (first, second) = tokio::join!(first, second);
    assert_eq!(
        first[0].as_ref().unwrap_err().code(),
        Code::DeadlineExceeded
    );
    assert_eq!(
        second[0].as_ref().unwrap_err().code(),
        Code::DeadlineExceeded
    );
    assert_soon(begun, Duration::from_millis(800));
}
