//! The rule of acceptance, as a table and over every small history.

use super::Judgement::{Accept, New};
use super::{Generation, judge};

#[test]
fn only_the_attached_generation_and_an_unconfirmed_attach_are_accepted() {
    let table = [
        // offered, attached, pending, judgement
        (None, 0, None, New),
        (None, 7, None, New),
        (None, 7, Some(8), New),
        (Some(7), 7, None, Accept),
        (Some(6), 7, None, New),
        (Some(8), 7, None, New),
        (Some(7), 7, Some(8), Accept),
        (Some(8), 7, Some(8), Accept),
        (Some(6), 7, Some(8), New),
        (Some(9), 7, Some(8), New),
        // A pending generation that is not the next one confirms nothing.
        (Some(9), 7, Some(9), New),
        (Some(7), 7, Some(9), Accept),
        (Some(6), 7, Some(6), New),
        // The last number of all has no next one.
        (Some(u64::MAX), u64::MAX, Some(u64::MAX), Accept),
        (Some(0), u64::MAX, Some(u64::MAX), New),
    ];
    for (offered, attached, pending, wanted) in table {
        let judged = judge(
            offered.map(Generation),
            Generation(attached),
            pending.map(Generation),
        );
        assert_eq!(judged, wanted, "{offered:?} {attached} {pending:?}");
    }
}

/// Walks all histories of attaches, each of which may stop before or after the superblock is
/// written. The medium itself is always accepted, and an older image of it never, once an attach
/// after the image was confirmed.
#[test]
fn a_medium_is_accepted_after_every_crash_and_its_old_images_are_not() {
    for history in 0..3u32.pow(7) {
        let (mut attached, mut pending) = (Generation(1), None);
        let mut on_disk = Generation(1);
        let mut images = vec![];
        let mut steps = history;
        for _ in 0..7 {
            assert_eq!(judge(Some(on_disk), attached, pending), Accept);
            // The generation that a new attach gets: after a crash, the pending one again.
            let next = attached.next();
            pending = Some(next);
            match steps % 3 {
                // The node dies before the superblock is written.
                0 => {}
                // The node dies before the master logs the attach.
                1 => on_disk = next,
                _ => {
                    images.push(on_disk);
                    on_disk = next;
                    attached = next;
                    pending = None;
                }
            }
            steps /= 3;
            for image in &images {
                if *image < attached {
                    assert_eq!(judge(Some(*image), attached, pending), New);
                }
            }
        }
    }
}
