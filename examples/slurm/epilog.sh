#!/bin/sh
# Slurm's Epilog, run by root on each node (slurm.conf: Epilog=/etc/slurm/ckptd-epilog.sh): what a job left there
# when it was killed (time limit, scancel, requeue) is uploaded before another job gets the node.
# Once per node: install -d -m 1777 /var/spool/ckptd-epilog. resume.sh notes there what `ckptd drain` needs, without
# secrets: a remote whose keys stand in the job's environment alone is not reached.
# Exit code 0 always: on any other Slurm takes the node out of service.
set -u
note=${CKPTD_EPILOG:-/var/spool/ckptd-epilog}/$SLURM_JOB_ID
[ -f "$note" ] || exit 0
# anybody may write there, and the note is run as the job's user
[ "$(stat -c %u "$note")" != "$SLURM_JOB_UID" ] || runuser "$SLURM_JOB_USER" -s /bin/sh <<EOF
. "$note"
ckptd drain "\$CKPTD_JOB" --deadline 10m
EOF
rm -f "$note"
exit 0
