use super::*;
use proptest::prelude::*;

const PAGE: u64 = 0x1000;

fn bounds(slice: u32, scatter: u32) -> Bounds {
    Bounds { slice, scatter }
}

fn item(verb: Verb, remote: u64, parts: &[(u64, u64)]) -> PlanItem {
    PlanItem {
        verb,
        remote: Remote {
            address: remote,
            rkey: 7,
        },
        parts: parts
            .iter()
            .map(|&(address, length)| PlanPart {
                address,
                length,
                lkey: 3,
            })
            .collect(),
    }
}

fn plan(items: &[PlanItem], bounds: Bounds) -> Plan {
    let mut plan = Plan::default();
    for (number, item) in items.iter().enumerate() {
        plan.add(number, item, bounds);
    }
    plan
}

#[test]
fn contiguous_runs_merge() {
    let items: Vec<PlanItem> = [5, 6, 7, 12, 13]
        .into_iter()
        .zip([2, 3, 4, 8, 9])
        .map(|(from, to)| item(Verb::Read, from * PAGE, &[(to * PAGE, PAGE)]))
        .collect();
    let plan = plan(&items, bounds(1 << 20, 16));
    let works = plan.works();
    assert_eq!(works.len(), 2);
    assert_eq!(
        (works[0].remote.address, works[0].length),
        (5 * PAGE, 3 * 4096)
    );
    assert_eq!(works[0].items, 0..3);
    assert_eq!(plan.parts(&works[0]).len(), 1);
    assert_eq!(plan.parts(&works[0])[0].addr, 2 * PAGE);
    assert_eq!(
        (works[1].remote.address, works[1].length),
        (12 * PAGE, 2 * 4096)
    );
    assert_eq!(works[1].items, 3..5);
}

#[test]
fn neighbours_with_another_key_or_verb_do_not_merge() {
    let mut other_key = item(Verb::Read, PAGE, &[(PAGE, PAGE)]);
    other_key.remote.rkey = 8;
    let items = [
        item(Verb::Read, 0, &[(0, PAGE)]),
        other_key,
        item(Verb::Write, 2 * PAGE, &[(2 * PAGE, PAGE)]),
    ];
    assert_eq!(plan(&items, bounds(1 << 20, 16)).works().len(), 3);
}

#[test]
fn scattered_memory_is_one_work_up_to_the_devices_limit() {
    let parts: Vec<(u64, u64)> = (0..20).map(|i| (i * 2 * PAGE, 100)).collect();
    let plan = plan(&[item(Verb::Write, 0, &parts)], bounds(1 << 20, 16));
    let counts: Vec<usize> = plan
        .works()
        .iter()
        .map(|work| plan.parts(work).len())
        .collect();
    assert_eq!(counts, [16, 4]);
    assert_eq!(plan.works()[1].remote.address, 1600);
}

#[test]
fn an_empty_item_needs_no_work() {
    let items = [
        item(Verb::Read, 0, &[]),
        item(Verb::Read, 0, &[(PAGE, 0), (PAGE, 0)]),
    ];
    assert!(plan(&items, bounds(4096, 1)).works().is_empty());
}

/// Items whose memory and remote ranges are often adjacent.
fn items() -> impl Strategy<Value = Vec<PlanItem>> {
    let part = (0_u64..8, 0_u64..5000, 0_u32..2);
    let one = (any::<bool>(), 0_u64..6, prop::collection::vec(part, 0..6));
    prop::collection::vec(one, 0..20).prop_map(|raw| {
        let mut remote = 0;
        raw.into_iter()
            .map(|(is_read, gap, parts)| {
                remote += if gap > 3 { gap * PAGE } else { 0 };
                let mut address = 0;
                let parts: Vec<PlanPart> = parts
                    .into_iter()
                    .map(|(skip, length, lkey)| {
                        address += if skip > 4 { skip * PAGE } else { 0 };
                        let part = PlanPart {
                            address,
                            length,
                            lkey,
                        };
                        address += length;
                        part
                    })
                    .collect();
                let start = remote;
                remote += parts.iter().map(|part| part.length).sum::<u64>();
                PlanItem {
                    verb: if is_read { Verb::Read } else { Verb::Write },
                    remote: Remote {
                        address: start,
                        rkey: 7,
                    },
                    parts,
                }
            })
            .collect()
    })
}

/// Every byte as (item, verb, remote address, local address, local key).
fn bytes_of_items(items: &[PlanItem]) -> Vec<(usize, Verb, u64, u64, u32)> {
    let mut bytes = Vec::new();
    for (number, item) in items.iter().enumerate() {
        let mut remote = item.remote.address;
        for part in &item.parts {
            for i in 0..part.length {
                bytes.push((number, item.verb, remote, part.address + i, part.lkey));
                remote += 1;
            }
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_byte_is_planned_once_in_order_and_within_bounds(
        items in items(), slice in 1000_u32..9000, scatter in 1_u32..5
    ) {
        let plan = plan(&items, bounds(slice, scatter));
        let expected = bytes_of_items(&items);
        let mut at = 0;
        for work in plan.works() {
            prop_assert!(work.length > 0 && work.length <= slice);
            let parts = plan.parts(work);
            prop_assert!(!parts.is_empty() && parts.len() <= scatter as usize);
            prop_assert_eq!(parts.iter().map(|part| part.length).sum::<u32>(), work.length);
            let mut remote = work.remote.address;
            for part in parts {
                for i in 0..u64::from(part.length) {
                    let (number, verb, there, here, lkey) = expected[at];
                    prop_assert!(work.items.contains(&number));
                    prop_assert_eq!((work.verb, remote, part.addr + i, part.lkey), (verb, there, here, lkey));
                    remote += 1;
                    at += 1;
                }
            }
            // Every named item has a byte in the work request.
            let first = expected[at - work.length as usize].0;
            prop_assert_eq!(work.items.clone(), first..expected[at - 1].0 + 1);
        }
        prop_assert_eq!(at, expected.len());
    }
}
