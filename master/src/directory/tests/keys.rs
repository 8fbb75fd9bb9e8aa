use super::*;
use smallvec::smallvec;
use std::collections::HashSet;

fn named(directory: &Directory, name: &str, version: u64) -> NewBlock {
    let key = Key::parse(name).unwrap();
    NewBlock {
        key,
        version: Version(version),
        ..block(directory, 0)
    }
}

fn version_of(directory: &Directory, namespace: NamespaceId, name: &str) -> Option<Version> {
    let mut version = None;
    directory.visit(
        namespace,
        &[Key::parse(name).unwrap().as_ref()],
        |_, block| {
            version = block.map(|block| block.version());
        },
    );
    version
}

fn affixed(prefix: &str, n: u8) -> String {
    format!("{prefix}@{}@bf16", format!("{n:02x}").repeat(32))
}

#[test]
fn keys_of_all_forms_and_namespaces_are_told_apart() {
    let directory = directory(Policy::Prefix);
    let digest = "ab".repeat(32);
    let names = [
        digest.clone(),
        format!("x{digest}"),
        format!("{digest}x"),
        format!("x{digest}x"),
        "plain".to_owned(),
        "x".repeat(1024),
    ];
    let mut version = 0;
    for namespace in [NamespaceId(0), NamespaceId(1), NamespaceId(u32::MAX)] {
        for name in &names {
            version += 1;
            put_block(
                &directory,
                NewBlock {
                    namespace,
                    ..named(&directory, name, version)
                },
            );
        }
    }
    version = 0;
    for namespace in [NamespaceId(0), NamespaceId(1), NamespaceId(u32::MAX)] {
        for name in &names {
            version += 1;
            assert_eq!(
                version_of(&directory, namespace, name),
                Some(Version(version)),
                "{name}"
            );
        }
    }
    let mut seen = HashSet::new();
    let next = directory.scan(&[], 1000, |block| {
        seen.insert((block.namespace(), block.key().to_string(), block.version()));
    });
    assert_eq!(next, Ok(None));
    assert_eq!(seen.len(), names.len() * 3);
    assert!(
        names
            .iter()
            .all(|name| seen.iter().any(|(_, key, _)| key == name))
    );
}

#[test]
fn keys_beyond_the_limit_of_the_interner_are_found() {
    let options = Options {
        interner: InternerLimit {
            pairs: 2,
            bytes: 1000,
        },
        ..Options::new(1)
    };
    let directory = Directory::new(options, NOW);
    for (version, prefix) in ["a", "b", "c"].iter().enumerate() {
        put_block(
            &directory,
            named(&directory, &affixed(prefix, 1), version as u64 + 1),
        );
    }
    assert_eq!(directory.interned(), 2);
    let third = affixed("c", 1);
    assert_eq!(version_of(&directory, NS, &third), Some(Version(3)));
    // After room comes back, another key of the third prefix interns it.
    let first = Key::parse(&affixed("a", 1)).unwrap();
    directory.remove(NS, &[first.as_ref()], |_| Verdict::Remove);
    assert_eq!(directory.interned(), 1);
    put_block(&directory, named(&directory, &affixed("c", 2), 4));
    assert_eq!(directory.interned(), 2);
    assert_eq!(
        version_of(&directory, NS, &third),
        Some(Version(3)),
        "stored the long way"
    );
    assert_eq!(
        version_of(&directory, NS, &affixed("c", 2)),
        Some(Version(4))
    );
    // A new version of it replaces it, whichever way it is stored.
    let replaced = directory
        .publish(vec![named(&directory, &third, 5)])
        .remove(0)
        .replaced;
    assert_eq!(replaced.unwrap().version, Version(3));
    assert_eq!(directory.blocks(), 3);
    for name in [third, affixed("c", 2), affixed("b", 1)] {
        let key = Key::parse(&name).unwrap();
        let removed = directory.remove(NS, &[key.as_ref()], |_| Verdict::Remove);
        assert!(matches!(removed[0], Removal::Removed(_)));
    }
    assert_eq!(
        (directory.blocks(), directory.interned(), directory.bytes()),
        (0, 0, 0)
    );
}

#[test]
fn large_batches_serve_every_key_and_duplicates() {
    let directory = directory(Policy::Prefix);
    directory.publish((0..1000).map(|n| block(&directory, n)).collect::<Vec<_>>());
    assert_eq!((directory.blocks(), directory.bytes()), (1000, 1000 * SIZE));
    let keys: Vec<Key> = (0..1500).chain(0..100).map(key).collect();
    let refs: Vec<_> = keys.iter().map(Key::as_ref).collect();
    for batch in [&refs[..], &refs[..20]] {
        let mut seen = vec![0; batch.len()];
        directory.visit(NS, batch, |index, block| {
            seen[index] += 1;
            assert_eq!(block.is_some(), number(&keys[index]) < 1000);
            if let Some(block) = block {
                assert_eq!(block.checksum(), Checksum(number(&keys[index])));
                assert_eq!(*block.replicas(), [replica(number(&keys[index]))]);
            }
        });
        assert!(seen.iter().all(|times| *times == 1));
    }
}

#[test]
fn the_leading_blocks_of_a_chain_and_no_others_are_handed_over() {
    let directory = directory(Policy::Lru);
    let all: Vec<_> = (0..200).map(|n| block(&directory, n)).collect();
    directory.publish(all);
    for gap in [0, 1, 63, 64, 199, 200] {
        if gap < 200 {
            remove(&directory, gap);
        }
        for length in [1, 40, 200] {
            let keys: Vec<Key> = (0..length).map(key).collect();
            let refs: Vec<_> = keys.iter().map(Key::as_ref).collect();
            let mut handed = Vec::new();
            let leading = directory.visit_leading(
                NS,
                &refs,
                |_| true,
                |index, block| handed.push((index, block.checksum())),
            );
            let expected = usize::try_from(length.min(gap)).unwrap();
            assert_eq!(leading, expected, "a gap at {gap} of {length}");
            handed.sort_unstable_by_key(|(index, _)| *index);
            let all = (0..expected).map(|index| (index, Checksum(index as u64)));
            assert_eq!(handed, all.collect::<Vec<_>>());
        }
        if gap < 200 {
            put(&directory, gap);
        }
    }
    // A block that is present but not wanted ends the chain, like a missing block.
    let keys: Vec<Key> = (0..200).map(key).collect();
    let refs: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let mut handed = 0;
    let wanted = |block: &BlockRef<'_>| block.checksum() != Checksum(70);
    let leading = directory.visit_leading(NS, &refs, wanted, |_, _| handed += 1);
    assert_eq!((leading, handed), (70, 70));
}

#[test]
fn only_a_later_version_replaces() {
    let directory = directory(Policy::Prefix);
    let id = put_block(
        &directory,
        NewBlock {
            version: Version(5),
            ..block(&directory, 1)
        },
    );
    for version in [4, 5] {
        let again = NewBlock {
            version: Version(version),
            ..block(&directory, 1)
        };
        let outcome = directory.publish(vec![again]).remove(0);
        assert!(outcome.id.is_none() && outcome.replaced.is_none());
    }
    lease(&directory, 1, BootInstant(NOW.0 + 50), NOW);
    let new = NewBlock {
        version: Version(6),
        length: Length(7),
        replicas: smallvec![replica(8), replica(9)],
        ..block(&directory, 1)
    };
    let outcome = directory.publish(vec![new]).remove(0);
    assert_eq!(outcome.id, Some(id));
    let replaced = outcome.replaced.unwrap();
    assert_eq!(
        (replaced.version, replaced.length),
        (Version(5), Length(SIZE))
    );
    assert_eq!(replaced.replicas[..], [replica(1)]);
    assert_eq!(
        replaced.lease_until,
        BootInstant(NOW.0 + 50),
        "its extents wait for its readers"
    );
    assert_eq!(directory.bytes(), 14);
}

#[test]
fn blocks_that_cannot_be_are_refused() {
    let directory = directory(Policy::Prefix);
    let outcomes = directory.publish(vec![
        NewBlock {
            length: Length(0),
            ..block(&directory, 1)
        },
        NewBlock {
            length: Length(1 << 32),
            ..block(&directory, 2)
        },
        NewBlock {
            replicas: smallvec![],
            ..block(&directory, 3)
        },
        NewBlock {
            length: Length((1 << 32) - 1),
            ..block(&directory, 4)
        },
    ]);
    let published: Vec<bool> = outcomes
        .iter()
        .map(|outcome| outcome.id.is_some())
        .collect();
    assert_eq!(published, [false, false, false, true]);
    assert_eq!(directory.blocks(), 1);
}

#[test]
fn replicas_are_dropped_one_by_one_and_the_last_takes_the_block() {
    let directory = directory(Policy::Prefix);
    let far = Replica {
        segment: SegmentId(2),
        offset: Offset(1 << 60),
        ..replica(5)
    };
    let spread = NewBlock {
        replicas: smallvec![replica(1), far],
        ..block(&directory, 1)
    };
    put_block(&directory, spread);
    assert_eq!(directory.bytes(), 2 * SIZE);
    let drop = |version, segment| {
        directory.drop_replica(NS, key(1).as_ref(), Version(version), SegmentId(segment))
    };
    assert_eq!(drop(1, 1), None, "another version");
    assert_eq!(drop(2, 3), None, "another segment");
    let first = drop(2, 1).unwrap();
    assert_eq!((first.replica, first.removed), (replica(1), None));
    assert_eq!(
        with(&directory, 1, |block| block.replicas().to_vec()),
        Some(vec![far])
    );
    assert_eq!(directory.bytes(), SIZE);
    let second = drop(2, 2).unwrap();
    assert_eq!(second.removed.unwrap().replicas[..], [far]);
    assert_eq!((directory.blocks(), directory.bytes()), (0, 0));
}

#[test]
fn removal_asks_first_and_by_id_minds_the_version() {
    let directory = directory(Policy::Prefix);
    let id = put_block(
        &directory,
        NewBlock {
            hard_pin: true,
            ..block(&directory, 1)
        },
    );
    put(&directory, 2);
    lease(&directory, 2, BootInstant(NOW.0 + 10), NOW);
    let keys = [1, 2, 3].map(key);
    let refs: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let kept = directory.remove(NS, &refs, |block| {
        let protected = block.is_hard_pinned() || block.is_leased(NOW, NO_FLOOR);
        if protected {
            Verdict::Keep
        } else {
            Verdict::Remove
        }
    });
    assert_eq!(kept, [Removal::Kept, Removal::Kept, Removal::Missing]);
    assert_eq!(
        directory.remove_by_id(id, Version(1), |_| Verdict::Remove),
        None
    );
    assert_eq!(
        directory.remove_by_id(id, Version(2), |_| Verdict::Keep),
        None
    );
    let removed = directory
        .remove_by_id(id, Version(2), |_| Verdict::Remove)
        .unwrap();
    assert_eq!(number(&removed.key), 1);
}

#[test]
fn a_scan_sees_every_lasting_block_once_while_others_come_and_go() {
    let directory = directory(Policy::Prefix);
    directory.publish((0..5000).map(|n| block(&directory, n)).collect::<Vec<_>>());
    let (mut page, mut seen, mut new) = (Vec::new(), Vec::new(), 5000);
    loop {
        let next = directory
            .scan(&page, 37, |block| seen.push(number(&block.key())))
            .unwrap();
        for _ in 0..20 {
            put(&directory, new);
            new += 1;
        }
        for n in (0..5000).skip(seen.len()).step_by(500) {
            if n % 2 == 1 {
                remove(&directory, n);
            }
        }
        match next {
            Some(next) => page = next,
            None => break,
        }
    }
    let distinct: HashSet<u64> = seen.iter().copied().collect();
    assert_eq!(distinct.len(), seen.len());
    assert!((0..5000).step_by(2).all(|n| distinct.contains(&n)));
    for bad in [&[1u8][..], &[0; 7], &[0; 9]] {
        assert_eq!(directory.scan(bad, 1, |_| ()), Err(BadPage));
    }
    assert_eq!(
        directory.scan(&[255; 8], 1, |_| ()),
        Ok(None),
        "beyond the end"
    );
}

#[test]
fn snapshots_of_all_shards_contain_every_block() {
    let first = directory(Policy::Prefix);
    put_block(
        &first,
        NewBlock {
            hard_pin: true,
            ..block(&first, 0)
        },
    );
    put_block(
        &first,
        NewBlock {
            soft_pin_until: Some(BootInstant(NOW.0 + 9)),
            ..block(&first, 1)
        },
    );
    for n in 2..50 {
        put_block(&first, child(&first, n, n - 1));
    }
    let mut records: Vec<StoredBlock> = Vec::new();
    for shard in 0..SHARDS {
        let of_shard = first.snapshot(shard);
        assert!(
            of_shard
                .iter()
                .all(|r| first.shard_of_key(r.namespace, r.key.as_ref()) == shard),
            "a shard is the same however many stripes there are"
        );
        records.extend(of_shard);
    }
    assert_eq!(records.len(), 50);
    for record in &records {
        let n = number(&record.key);
        assert_eq!(record.parent.as_ref().map(number), (n >= 2).then(|| n - 1));
        assert_eq!(
            (record.version, record.checksum),
            (Version(n + 1), Checksum(n))
        );
        assert_eq!(record.replicas, [replica(n)]);
        assert_eq!(record.hard_pin, n == 0);
        assert_eq!(
            record.soft_pin_until,
            (n == 1).then_some(BootInstant(NOW.0 + 9))
        );
    }
    // Rebuilt shard by shard: blocks are linked when all are present.
    let second = directory(Policy::Prefix);
    let ids: Vec<BlockId> = records
        .iter()
        .map(|record| {
            put_block(
                &second,
                NewBlock {
                    ..block(&second, number(&record.key))
                },
            )
        })
        .collect();
    let mut links: Vec<Link<'_>> = records
        .iter()
        .zip(ids)
        .filter_map(|(record, block)| {
            let parent = record.parent.as_ref()?.as_ref();
            Some(Link {
                namespace: NS,
                block,
                version: record.version,
                parent,
            })
        })
        .collect();
    second.link(&mut links);
    let mut evicted = evict(&second, 50, NOW);
    evicted.retain(|n| *n != 0);
    let chain: Vec<u64> = (1..50).rev().collect();
    assert_eq!(evicted, chain, "the chain goes from its end");
}
