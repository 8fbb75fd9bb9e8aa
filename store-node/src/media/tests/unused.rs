//! Media that the node does not use, and its reports of them.

use super::*;

const OTHER: ClusterId = ClusterId(0xc2);

/// A node whose disk can be damaged, and the order to attach its medium.
fn node_with_disk() -> (Media, Arc<Faulty>, proto::AttachMedium) {
    let arena = Arena::new(4 * size()).unwrap();
    let (disk, engine) = disk(1, &arena);
    let order = order(&disk, 1);
    let mut media = Media::of(vec![disk], arena, store());
    media.start_workers().unwrap();
    (media, engine, order)
}

/// The next list of media that the node sends.
fn list(answered: &mut UnboundedReceiver<ToMaster>) -> proto::Media {
    match answered.blocking_recv() {
        Some(ToMaster::Media(list)) => list,
        other => panic!("{other:?} where a list of media belongs"),
    }
}

#[test]
fn a_medium_of_another_pool_is_reported_with_both_pools_until_its_own_pool_is_back() {
    let (media, _engine, order) = node_with_disk();
    let (answers, mut answered) = unbounded_channel();
    media.begin(OTHER, answers);
    let told = list(&mut answered);
    assert!(told.media.is_empty(), "{told:?}");
    assert_eq!(told.unused.len(), 1, "{told:?}");
    let unused = &told.unused[0];
    assert_eq!(unused.path, "ssd1");
    assert_eq!(unused.medium_id, order.medium_id);
    let pools = format!("it belongs to pool {CLUSTER}, this is pool {OTHER}. ");
    assert!(unused.reason.starts_with(&pools), "{unused:?}");

    let (answers, mut answered) = unbounded_channel();
    media.begin(CLUSTER, answers);
    let told = list(&mut answered);
    assert_eq!((told.media.len(), told.unused.len()), (1, 0), "{told:?}");
}

#[test]
fn a_medium_that_the_master_refuses_is_reported_until_the_master_attaches_it() {
    let (media, _engine, order) = node_with_disk();
    let (answers, mut answered) = unbounded_channel();
    media.begin(CLUSTER, answers.clone());
    let told = list(&mut answered);
    assert_eq!((told.media.len(), told.unused.len()), (1, 0), "{told:?}");
    assert!(media.may_be_attached());

    let refusal = proto::RefuseMedium {
        medium_id: order.medium_id.clone(),
        reason: "it is a copy".into(),
    };
    // The master refuses the medium in each list.
    for _ in 0..2 {
        media.refuse(refusal.clone(), &answers);
    }
    let told = list(&mut answered);
    assert_eq!((told.media.len(), told.unused.len()), (1, 1), "{told:?}");
    assert_eq!(told.unused[0].path, "ssd1");
    assert_eq!(told.unused[0].reason, "it is a copy");
    assert_eq!(told.unused[0].medium_id, order.medium_id);
    assert!(!media.may_be_attached() && !media.is_attached());
    let refused = Attachment::Refused("it is a copy".into());
    assert_eq!(media.status()[0].attachment, refused);

    media.attach(CLUSTER, order, answers);
    let (mut is_attached, mut is_told) = (false, false);
    while !(is_attached && is_told) {
        match answered.blocking_recv() {
            Some(ToMaster::MediumAttached(_)) => is_attached = true,
            Some(ToMaster::Media(told)) => {
                assert!(told.unused.is_empty(), "{told:?}");
                is_told = true;
            }
            other => panic!("{other:?} where an attachment or a list belongs"),
        }
    }
    assert!(media.is_attached());
}

/// A new leader may decide otherwise.
#[test]
fn a_refusal_of_a_medium_ends_with_its_session() {
    let (media, _engine, order) = node_with_disk();
    let (answers, mut answered) = unbounded_channel();
    media.begin(CLUSTER, answers.clone());
    list(&mut answered);
    let refusal = proto::RefuseMedium {
        medium_id: order.medium_id,
        reason: "it is a copy".into(),
    };
    media.refuse(refusal.clone(), &answers);
    assert!(!media.may_be_attached());
    drop(answered);
    assert!(media.may_be_attached());
    let (later, mut answered) = unbounded_channel();
    media.begin(CLUSTER, later);
    assert!(list(&mut answered).unused.is_empty());
    media.refuse(refusal, &answers);
    assert!(media.may_be_attached(), "the refusal came late");
}

#[test]
fn a_medium_whose_disk_fails_at_its_attachment_is_reported_with_the_reason() {
    const EIO: i32 = 5;
    let (media, engine, order) = node_with_disk();
    let (answers, mut answered) = unbounded_channel();
    media.begin(CLUSTER, answers.clone());
    list(&mut answered);
    engine.on_writes(0..u64::MAX, u64::MAX, Fault::Errno(EIO));
    media.attach(CLUSTER, order.clone(), answers);
    let told = list(&mut answered);
    assert_eq!((told.media.len(), told.unused.len()), (0, 1), "{told:?}");
    let unused = &told.unused[0];
    assert_eq!(unused.path, "ssd1");
    assert_eq!(unused.medium_id, order.medium_id);
    let remedy = ". It is not used until the node restarts";
    assert!(unused.reason.ends_with(remedy), "{unused:?}");
    assert!(!media.may_be_attached());
}
