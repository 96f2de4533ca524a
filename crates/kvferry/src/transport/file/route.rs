//! The only route of the files' link.

use super::share::FileShare;
use super::targets::Targets;
use super::{File, Shared};
use crate::error::Result;
use crate::sync::Arc;
use crate::transfer::caller::drive;
use crate::transfer::drive::background;
use crate::transfer::job::{Frames, Job};
use crate::transfer::kind::Transport;
use crate::transfer::link::{Link, Offered, Route};
use crate::transfer::slot::Interrupt;

pub(super) struct FileRoute(pub(super) Arc<Shared>);

impl FileRoute {
    fn share(&self, link: &Arc<Link>, job: &Arc<Job>, is_callers: bool) -> Result<FileShare> {
        let targets = Targets::of(&job.batch, job.op, &self.0.table)?;
        let share = FileShare::new(&self.0, link, job, targets, is_callers)?;
        job.start_shares(1, File::KIND, Frames::Messages);
        Ok(share)
    }
}

impl Route for FileRoute {
    fn transport(&self) -> &'static dyn Transport {
        &File
    }

    fn run(&self, link: &Arc<Link>, job: &Arc<Job>, interrupt: Interrupt<'_>) -> Offered {
        match self.share(link, job, true) {
            Ok(share) => {
                link.begin();
                drive(job, link, &[], interrupt, [|wake| share.woken_by(wake)]);
                link.finish();
                Offered::Taken
            }
            Err(e) => Offered::Refused(e),
        }
    }

    fn submit(&self, link: &Arc<Link>, job: &Arc<Job>) -> Offered {
        match self.share(link, job, false) {
            Ok(share) => {
                background(job, link, None, |_, _| {}, |wake| share.woken_by(wake));
                Offered::Taken
            }
            Err(e) => Offered::Refused(e),
        }
    }
}
